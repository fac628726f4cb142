"""Runs templates and tokenizers in worker processes, which a row may kill.

``TextProcesses`` (``pool``) is the entry point. It starts a *fork server* (``server_process``,
``fork_server``): an interpreter without torch that loads the tokenizer once and forks *workers*
(``worker``). A worker renders and tokenizes batches of rows under limits that the operating system
enforces (``limits``). Its exit status shows why it died (``deaths``).

Why processes: a template or a tokenizer's pattern is a program. It can loop, fill memory, or
trigger a bug in native code, which then panics, overflows its stack or aborts. No check finds all
of these beforehand, and the process in which they happen dies.

Why not ``multiprocessing``'s fork server: it imports the user's ``__main__`` again, which fails for
a script without a guard; and each worker would load the tokenizer itself, which takes half a second
and 100 MB for a vocabulary of 150,000. Only its ``Connection`` is used, for messages. Forking the
job's own process would be unsafe, because torch has threads.
"""
