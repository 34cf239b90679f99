"""Figures of the documentation: the data of each, and how they are drawn."""
