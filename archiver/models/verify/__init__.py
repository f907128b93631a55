"""A packed model beside the original, and the report of it."""
