"""RLlib: rows, or whole episodes, as Parquet for its offline algorithms."""
