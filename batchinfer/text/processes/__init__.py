"""Runs templates and tokenizers in worker processes, because a row may kill its process.

``TextProcesses`` (``pool``) is the entry point and starts a *fork server* (``server_process``,
``fork_server``): an interpreter without torch that loads the tokenizer once and forks *workers*
(``worker``). A worker renders and tokenizes batches of rows under limits that the operating system
enforces (``limits``). A dead worker's exit status shows why it died (``deaths``).

A template or a tokenizer's pattern is a program that can loop, fill memory, or trigger a bug in
native code, which then panics, overflows its stack or aborts. No check finds all such faults
beforehand, and each of them ends the process in which it happens.

The fork server of ``multiprocessing`` is not suitable. That server imports the user's ``__main__``
again, which fails for a script without a guard. Each worker would load the tokenizer itself, which
takes half a second and 100 MB for a vocabulary of 150,000. This package uses only the
``Connection`` of ``multiprocessing``, for messages. Forking the job's own process would be unsafe,
because torch has threads.
"""
