"""Facts about collectives: exposed communication, instances across ranks, bandwidth, latency, gaps."""
