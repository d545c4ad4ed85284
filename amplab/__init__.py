"""amplab: a lab for automatic mixed precision, on a library that stands on its own."""

__version__ = "0.1.0"
