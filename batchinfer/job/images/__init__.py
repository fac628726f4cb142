"""Finds the images of a job's rows, gives them numbers, and loads their pixels."""
