"""Tile programs and the templates that schedule them: PrimFunc -> schedules."""
