"""Images and labels: digits, MNIST, CIFAR, folders of yours, in batches on the device."""
