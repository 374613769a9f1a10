/* A plain direct-I/O reader, as a measure for others: threads that open, read and close files.
 *
 * Compiled and called by benchmarks/store.py. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

struct job {
    const char **paths;
    char *buffer;
    size_t num_files, file_bytes;
    atomic_size_t next, num_failed;
};

static void *read_files(void *argument) {
    struct job *job = argument;
    size_t i;
    while ((i = atomic_fetch_add(&job->next, 1)) < job->num_files) {
        int fd = open(job->paths[i], O_RDONLY | O_DIRECT | O_CLOEXEC);
        ssize_t count = fd < 0 ? -1 : pread(fd, job->buffer + i * job->file_bytes, job->file_bytes, 0);
        if (count != (ssize_t)job->file_bytes) {
            atomic_fetch_add(&job->num_failed, 1);
        }
        if (fd >= 0) {
            close(fd);
        }
    }
    return NULL;
}

/* Reads each file to its place in the buffer, num_threads at a time; returns how many failed. */
size_t read_plainly(const char **paths, char *buffer, size_t num_files, size_t file_bytes,
                    size_t num_threads) {
    struct job job = {paths, buffer, num_files, file_bytes, 0, 0};
    pthread_t threads[256];
    size_t num_started = 0;
    while (num_started < num_threads && num_started < 256 &&
           pthread_create(&threads[num_started], NULL, read_files, &job) == 0) {
        num_started++;
    }
    for (size_t i = 0; i < num_started; i++) {
        pthread_join(threads[i], NULL);
    }
    return num_started ? job.num_failed : num_files;
}
