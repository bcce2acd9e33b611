"""The command line: one module per command or pair of commands. They parse, call one library function, and print."""
