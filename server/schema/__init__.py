"""Request bodies: from bytes to typed values, or to the first error with its exact path."""
