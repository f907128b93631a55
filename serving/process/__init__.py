"""The process and its machine: signals, memory, cores, open files."""
