"""Files of workers on their way to the output.

``publisher`` puts the parts that workers have handed over in their places.
"""
