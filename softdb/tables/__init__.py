"""Records in tables: names of columns, batches of rows, and frames and Arrow tables as such batches."""
