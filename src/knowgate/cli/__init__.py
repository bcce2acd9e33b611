"""The command line: one module per command. Commands parse, call one library function, and print."""
