"""The program: commands and their options, exit codes, crash logs, ``bench``.

May import: errors, process, config, console, worker.model, job, report, llm.
"""
