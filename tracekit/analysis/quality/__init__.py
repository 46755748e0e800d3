"""Facts about the data itself: what each trace contains, what is missing, what is doubtful."""
