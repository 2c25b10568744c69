"""Region and footprint analysis of fusion groups: plain arithmetic on frozen data."""
