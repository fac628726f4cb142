"""The output directory: its parts and their commit, and the plan of a run that resumes it.

``directory`` has the paths. ``segments`` stores finished rows of unfinished parts, ``commit``
finishes a part, and ``resume`` decides which parts a run has to write.
"""
