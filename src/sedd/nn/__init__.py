"""Networks: transformers, their blocks, attention, embeddings and layers."""
