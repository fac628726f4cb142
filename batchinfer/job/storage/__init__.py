"""Locks outputs, and accesses local files, object stores and the Hugging Face Hub."""
