"""A model on several ranks: shards of its weights, the sums over them, and the processes of all ranks but the first."""
