"""Serving: in-flight batching of sampling, and an HTTP interface that OpenAI's clients can use."""
