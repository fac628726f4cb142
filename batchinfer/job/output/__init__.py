"""The output directory: its parts and their commit, and the plan of a run that resumes it.

``directory`` has the paths. ``finished_row_segments`` stores finished rows of unfinished parts,
``commit`` finishes a part, and ``resume`` decides which parts a run has to write. Functions that
write to the output directory raise StorageError if the file system refuses.
"""
