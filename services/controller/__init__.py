"""The controller: the cluster's state and every global decision, pure, in a dull asyncio shell."""
