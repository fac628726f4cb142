"""Templates and tokenizers in worker processes, which may die of a row.

``TextProcesses`` (``pool``) is the way in. It starts a *fork server* (``server_process``,
``fork_server``): an interpreter without torch that loads the tokenizer once and forks *workers*
(``worker``). A worker renders and tokenizes batches of rows under limits that the kernel enforces
(``limits``). Its exit status says what it died of (``deaths``).

Why processes: a template or a tokenizer's pattern is a program. It can loop, fill memory, or hit a
bug of native code, which then panics, overflows its stack or aborts. No check beforehand finds all
of these, and the process that they happen in does not survive.

Why not ``multiprocessing``'s fork server: it imports the user's ``__main__`` again, which a script
without a guard does not survive; and each of its workers would load the tokenizer for itself, in
half a second and 100 MB for a vocabulary of 150,000. Its ``Connection`` carries our messages.
Forking the job's own process is unsafe: torch has threads.
"""
