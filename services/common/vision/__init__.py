"""Models that see pictures: their towers' sizes, and what becomes of a picture before a tower reads it."""
