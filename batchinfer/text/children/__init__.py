"""Templates and tokenizers in processes of their own, which may die of a row.

``TextProcesses`` (``pool``) is what others use. It starts a *spawner* (``spawner``): an interpreter
without torch that loads the tokenizer once and forks *children* off itself (``child``). A child
renders and tokenizes lots of rows under limits that the kernel enforces (``limits``); what it dies
of is known from its end and from what it said before (``messages``, ``verdicts``).

Why processes: a template or a tokenizer's pattern is a program. It can loop, fill memory, or meet a
bug of the native code below it, which then panics, overflows its stack or aborts. No check in front
of it foresees all of that, and nothing in the same process survives it.

Why these and not a library's: ``multiprocessing`` (and with it loky and pebble) starts processes by
importing the user's ``__main__`` again, which a script without a guard does not survive; in
``concurrent.futures`` and loky one dead process fails all that is in flight; pebble bounds the time
of a task, but by the clock on the wall and with a trip through three threads for each; none bounds
memory or says what a process died of. Forking the job's own process is unsafe: torch has threads.
"""
