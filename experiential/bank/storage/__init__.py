"""What is kept on disk: the journal and what reads it, the lock, the queue, the exchange files."""
