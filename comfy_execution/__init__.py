"""Running prompts: validation, queue, execution, caches, events. No torch, no server.

How a program puts the parts together (``main.py`` does so with its policies)::

    registry = NodeRegistry(nodes.NODE_CLASS_MAPPINGS, nodes.NODE_DISPLAY_NAME_MAPPINGS)
    install(registry)                              # for execution.validate_prompt
    journal = Journal(user_directory / "queue.sqlite")
    queue = PromptQueue(interrupt=INTERRUPT, journal=journal)
    server = PromptServer(loop, options, Services(queue, validate=execution.validate_prompt))
    executor = PromptExecutor(
        registry, server, INTERRUPT,
        ExecutorOptions(cache=make_cache("classic"), run_context=torch.inference_mode,
                        oom_hook=free_after_oom),
    )
    recover(queue, journal, StartMode.RESUME)      # what the last process left
    breaker = Breaker(executor.guard, INTERRUPT.exception, queue.is_running)
    queue.add_interrupt_listener(breaker.follow)   # busy nodes that do not look
    set_progress_bar_global_hook(make_progress_hook())
    Worker(queue, executor, WorkerHooks(unload_models=unload_all_models)).start()

The names are those of the modules registry, journal, queue, executor, caching, recovery, breaker,
progress and worker; ``supervise`` of the module supervisor wraps the whole process.
"""
