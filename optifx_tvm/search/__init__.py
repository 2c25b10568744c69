"""Planners: from a ConvGraph to the partition into fusion groups."""
