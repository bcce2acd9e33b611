"""The command line: one module per command, or for commands that belong together. Commands parse, call one library function, and print."""
