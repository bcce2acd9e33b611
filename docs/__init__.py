"""The documentation: pages to read, examples that tests run, and what is made from the code when it is built."""
