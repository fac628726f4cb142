"""The output directory: its parts and their commit, and the plan of a run that resumes it.

``directory`` has the paths, ``segments`` finished rows of unfinished parts, ``commit`` the steps
that finish a part, ``resume`` the decision which parts are left to make.

May import: errors, console, engine, text, job.
"""
