"""Runs templates and tokenizers in worker processes, because a row may kill its process.

``TextProcesses`` (``pool``) is the entry point. It starts a *fork server* (``server_process``,
``fork_server``): an interpreter without torch that loads the tokenizer once and forks *workers*
(``worker``). A worker renders and tokenizes batches of rows under limits that the operating system
enforces (``limits``). Its exit status shows why it died (``deaths``).

A template or a tokenizer's pattern is a program, so it needs a process of its own. It can loop,
fill memory, or trigger a bug in native code, which then panics, overflows its stack or aborts. No
check finds all of these faults beforehand, and they end the process in which they happen.

The fork server of ``multiprocessing`` is not suitable. It imports the user's ``__main__`` again,
which fails for a script without a guard. Each worker would load the tokenizer itself, which takes
half a second and 100 MB for a vocabulary of 150,000. This package uses only the ``Connection`` of
``multiprocessing``, for messages. It would be unsafe to fork the job's own process, because torch
has threads.
"""
