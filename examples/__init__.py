"""Programs to read and to start from; they are no part of the package."""
