"""`octavo run-batch`: a file of requests in, a file of replies out, without a network between."""
