-- The names of all jobs of a namespace, as bytes, since one that isn't UTF-8 must not hide the others.
-- Argument: namespace.
SELECT CAST(name AS BLOB) FROM leaselib_jobs WHERE namespace = ?
