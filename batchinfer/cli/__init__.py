"""The program: commands and their options, exit codes, crash logs, ``bench``."""
