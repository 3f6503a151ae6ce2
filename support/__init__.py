"""What any run needs and no lesson is about: flags, data, optimizers, processes, measuring."""
