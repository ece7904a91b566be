"""Core's own models as resources: their weights are read when core loads them, and are views of the file again afterwards."""
