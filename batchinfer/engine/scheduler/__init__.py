"""Who runs next: admission, preemption, and the blocks of what runs.

May import: engine.step, engine.request, engine.kv, engine.sequence, engine.stats.
"""
