"""The GPU as everything else in ``common`` sees it: memory, handles of it, copies of blocks."""
