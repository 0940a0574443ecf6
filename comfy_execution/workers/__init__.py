"""Several workers: prompts run in other processes, on this machine or, through Ray, on others.

The server keeps the queue, the history and the sockets. Each worker is the same program, started as
a child, with its own device, its own executor and its own results. Between them go messages of
plain JSON and nothing else::

    server                                        worker
    WorkerPool  chooses prompt and place          Seat  puts it in its own small queue
    Place       one worker: starts, restarts      Worker, PromptExecutor  as without workers
    Channel     local pipes or a Ray actor  <-->  Channel  standard input and output

messages: what goes through. channel: how, between processes. local, ray_bridge, ray_actors: how a
worker is started. affinity: which prompt goes where. job, place, pool: the server's side. seat: the
worker's.
"""
