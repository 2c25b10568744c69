"""Predicted time of a fusion group: what the search minimises."""
