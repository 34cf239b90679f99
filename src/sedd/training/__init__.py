"""Training: from a configuration to a folder with a model, on one process or many.

The order of the data, times, noise and dropout are functions of the configuration and the step's number alone. So a run
that was stopped and resumed computes exactly what an uninterrupted one does, and two processes compute what one does.
"""
