"""What a job would take, without a GPU and without its memory: the build and one step, simulated on shapes alone."""
