"""The table of command-line options, by subject; `comfy.cli_args` makes one parser of them."""
