"""Who runs next: admission, preemption, and the blocks of what runs.

May import: engine.kv, engine.request, engine.sequence.
"""
