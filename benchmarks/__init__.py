"""What makes the tables of docs/benchmarks."""
