"""Object storage: images from a bucket, and a copy of the run in one. The core loads it by `plugins.bucket_part`."""
