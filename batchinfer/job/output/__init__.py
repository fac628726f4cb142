"""The output directory: its parts and their commit, and the plan of a run that resumes it.

``directory`` has the paths. ``finished_row_segments`` stores finished rows of unfinished parts,
``commit`` finishes a part, and ``resume`` decides which parts a run has to write. All functions
raise StorageError if the output directory cannot be read or written.
"""
