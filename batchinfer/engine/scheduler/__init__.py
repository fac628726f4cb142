"""Who runs next: admission, preemption, and the blocks of what runs."""
