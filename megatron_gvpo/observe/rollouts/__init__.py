"""The responses of a run as Parquet files: their columns, the thread that writes them, the reader."""
